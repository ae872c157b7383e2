"""Pools of bytes: groups of caches are sized, allocated, copied and poisoned here, whatever they are called."""
