"""Call the server with NVIDIA Triton's own, unmodified client.

pip install 'tritonclient[http]'
normserve serve
python examples/triton_client.py --address 127.0.0.1:8000
"""

import argparse

import numpy as np
import tritonclient.http as triton


def layer_norm(address: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x normalised along its last axis and multiplied by weight.

    Args:
        address: HOST:PORT.
        x: [..., columns] float32.
        weight: [columns] float32.
    """
    inputs = []
    for name, array in (("x", x), ("weight", weight)):
        tensor = triton.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    client = triton.InferenceServerClient(address)
    try:
        return client.infer("layer_norm", inputs, parameters={"eps": 1e-5}).as_numpy("y")
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:8000")
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 256), np.float32)
    y = layer_norm(parser.parse_args().address, x, np.ones(256, np.float32))
    print(f"y {y.shape}: mean {abs(y.mean(axis=-1)).max():.1e} at most, deviation {y.std(axis=-1).mean():.4f}")


if __name__ == "__main__":
    main()
