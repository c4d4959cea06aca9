"""EngineCoreClient: the same calls over each kind of engine link."""
