"""The commands: each turns its arguments into a `dsl.model.Request` and hands it on."""
