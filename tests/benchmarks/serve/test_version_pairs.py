from benchmarks.serve.version_pairs import compute_median_interval


def test_interval_of_fifteen_values_leaves_out_three_at_each_end():
    # P(fewer than 4 of 15 fall below the median) = 0.0176, so ranks 4 and 12 hold it with 96.5 %.
    assert compute_median_interval([float(value) for value in range(15, 0, -1)]) == (4.0, 12.0)


def test_interval_of_few_values_is_all_of_them():
    assert compute_median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert compute_median_interval([2.0]) == (2.0, 2.0)
