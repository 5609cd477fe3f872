"""The inference engine: model, caches, scheduler, backends. It knows nothing of HTTP."""
