"""From a `dsl.model.Request` to a `dsl.model.NodePlan`: every rule of the launch, as pure functions."""
