"""Known calls without Python: an extension in C++, optional, which `python -m fusednorm.host` compiles."""
