"""The HTTP server: the OpenAI wire format over the engine."""
