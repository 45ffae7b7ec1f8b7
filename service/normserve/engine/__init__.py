"""From an admitted job to its result: what shares a launch, who waits for it, and the thread of the device."""
