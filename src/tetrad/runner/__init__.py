"""The device's side of a step: the request table, rows, buffers, sampling."""
