"""The one model definition, over `ops.base.Ops`; it never names a backend."""
