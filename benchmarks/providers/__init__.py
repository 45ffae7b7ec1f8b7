"""The providers: fusednorm, torch and other libraries' kernels, each as one function of a problem."""
