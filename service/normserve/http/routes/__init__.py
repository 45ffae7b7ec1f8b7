"""The routes: they translate between HTTP and the engine.  Each module creates a router from its arguments."""
