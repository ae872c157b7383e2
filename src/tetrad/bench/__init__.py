"""How fast the ops are, measured so that a reader can rerun it: ``tetrad bench``.

A case goes :mod:`cases` -> :mod:`inputs` -> :mod:`correctness` -> :mod:`timing`, for every contender of :mod:`peers`;
:mod:`measurement` runs them, :mod:`report` and :mod:`roofline` show the results.
"""
