"""The commands: each turns its arguments into a `dsl.model.request.Request` and hands it on."""
