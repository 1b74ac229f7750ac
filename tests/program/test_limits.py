# SPDX-License-Identifier: Apache-2.0
"""`weft limits`: a number for each way of copying."""

from conftest import weft

QUICK = ["--device", "cpu", "--seconds", "0.002", "--source-bytes", 1 << 18]


def test_every_way_of_copying_has_a_rate():
    done = weft("limits", "--ranks", 2, "--row-bytes", "512,4096", *QUICK)
    lines = [line.split() for line in done.stdout.splitlines() if line[:1] in " 12" and "B" in line]
    assert [line[:3] for line in lines] == [
        [ranks, size, "B"] for ranks in "12" for size in ("512", "4,096")
    ]
    assert all(float(rate) > 0 for line in lines for rate in line[3:])
    assert all(len(line) == 9 for line in lines)


def test_rows_that_cannot_be_copied_are_refused():
    assert "multiple of 16" in weft("limits", "--row-bytes", 40, *QUICK, code=1).stderr
    assert "--ranks" in weft("limits", "--ranks", 0, code=2).stderr


def test_files_are_for_rates_of_gpus():
    assert "only the limits of GPUs" in weft("limits", *QUICK, "--json", "x.json", code=2).stderr
    assert "--device" in weft("limits", "--device", "tpu", code=2).stderr
