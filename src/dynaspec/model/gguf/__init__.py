"""GGUF files as checkpoints: ``file`` reads the format, ``config`` translates keys to what the families know,
``checkpoint`` hands out tensors."""
