"""The dynamic loss scaler of lesson 3.4 follows the largest gradient."""

import loss_scaling


def test_only_overflowing_steps_are_skipped_and_the_scale_follows_smaller_gradients():
    steps = loss_scaling.dynamic_scales([3.0] * 12 + [0.5] * 12, scale=2.0**16, window=4)
    scales = [scale for scale, _ in steps]
    skipped = [number for number, (_, overflow) in enumerate(steps, start=1) if overflow]
    assert skipped == [1, 2, 7, 12]
    assert [number for number, scale in enumerate(scales[:12], start=1) if 3 * scale > 65_504] == skipped
    assert scales[0] == 2**16
    assert scales[-1] > scales[11]
