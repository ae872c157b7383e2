"""DeepSeek-V4 as the paper tells it: layers, a step's metadata, cache groups, configurations and checkpoints."""
