"""Who is timed: fusednorm, torch and other makers' kernels, each as one function of a problem."""
