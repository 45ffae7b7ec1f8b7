"""What a caller holds: passes, differentiable functions, modules, operators, and what compiles ahead."""
