"""The command `tetrad`: flags, streams, signals, progress. It knows everything and decides nothing."""
