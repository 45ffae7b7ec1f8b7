"""HTTP in, HTTP out; nothing else.  Each module makes a router from what it is handed."""
