"""The commands. Most turn their arguments into a `dsl.model.request.Request` and hand it on."""
