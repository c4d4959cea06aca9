"""Weight transports: each yields named tensors and knows nothing of the scheduler or the model."""
