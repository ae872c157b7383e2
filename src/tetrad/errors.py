"""What a user can get wrong, by kind. Each error says what was wrong and what to change."""

from __future__ import annotations


class TetradError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(TetradError, ValueError):
    """A configuration (command line, ``EngineArgs`` or ``config.json``) that cannot be served as it stands."""


class CheckpointError(TetradError, ValueError):
    """A checkpoint whose files or tensors do not fit the model."""


class RequestError(TetradError, ValueError):
    """One request that cannot be served; other requests go on."""


class DeviceLostError(TetradError, RuntimeError):
    """The device answers no more: every request ends with this error, and the engine must be built anew."""
