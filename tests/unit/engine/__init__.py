"""Tests of the engine: model runner, scheduler, sampler, weights, control, process."""
