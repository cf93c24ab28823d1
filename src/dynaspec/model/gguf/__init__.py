"""GGUF files as checkpoints: ``file`` reads the format, ``names`` and ``config`` translate to what the families know,
``checkpoint`` hands out tensors, ``dequantise`` makes numbers of quantised ones."""
