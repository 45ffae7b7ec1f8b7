"""The protocol's `.proto` files, and `services.binpb`, to which `python -m normserve.grpc.protos` compiles them."""
