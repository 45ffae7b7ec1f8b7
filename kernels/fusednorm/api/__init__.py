"""The public functions: passes, differentiable functions, modules, operators and warm-up."""
