"""EngineCore: scheduler, KV cache, model runner, sampler and weights. Knows no client or frontend."""
