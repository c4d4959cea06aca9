"""The wire between a frontend and an EngineCore: messages, codec and framing. No I/O. See rust/protocol/PROTOCOL.md."""
