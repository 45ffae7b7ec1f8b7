from fusednorm.arguments import checks as of_library
from normserve.codec.api_names import ACTIVATIONS


def test_the_api_has_the_activations_of_the_library():
    assert set(ACTIVATIONS) == set(of_library.ACTIVATIONS)
