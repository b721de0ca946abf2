"""Laws of the row formats: rounded once, by no more than the format explains."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scone_core.artifacts.manifests import RowFormat
from scone_core.table.row_formats import (
    STORAGE,
    as_array,
    as_tensor,
    convert_rows,
    embedding_batch,
    from_storage,
    rounding_error,
    table_rows,
    to_storage,
    width_of,
)
from tests.builders.tables import random_vectors

PLAIN: list[RowFormat] = ["bf16", "fp16", "fp32"]
QUANTISED: list[RowFormat] = ["int8", "fp8"]


@pytest.mark.parametrize("row_format", PLAIN)
def test_a_vector_is_rounded_once_to_the_stored_dtype(row_format: RowFormat) -> None:
    vectors_SD = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    vectors_SD[0, :3] = torch.tensor([float("inf"), -0.0, float("nan")])
    rows_SD = from_storage(to_storage(vectors_SD, row_format), row_format)
    expected_SD = vectors_SD.to(STORAGE[row_format].vectors)
    torch.testing.assert_close(rows_SD, expected_SD, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(rows_SD[0, 1])


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-60000, 60000, width=32),
    ),
    st.sampled_from(list(STORAGE)),
)
@settings(max_examples=200, deadline=None)
def test_no_value_is_further_off_than_half_a_step(
    vectors: np.ndarray, row_format: RowFormat
) -> None:
    vectors_SD = torch.from_numpy(vectors)
    stored_SD = from_storage(to_storage(vectors_SD, row_format), row_format).float()
    allowed_SD = rounding_error(vectors_SD, row_format) * (1 + 1e-5) + 1e-37
    assert ((stored_SD - vectors_SD).abs() <= allowed_SD).all()


@pytest.mark.parametrize("row_format", QUANTISED)
def test_a_record_is_a_float32_scale_and_one_byte_per_value(row_format: RowFormat) -> None:
    vectors_SD = random_vectors(9, 12)
    rows_SC = to_storage(vectors_SD, row_format)
    assert rows_SC.dtype == np.uint8
    assert rows_SC.shape == (9, 4 + 12)
    assert width_of(rows_SC, row_format) == 12
    scale_S = rows_SC[:, :4].copy().view(np.float32)[:, 0]
    largest_S = vectors_SD.abs().amax(1).numpy()
    np.testing.assert_allclose(scale_S * {"int8": 127, "fp8": 448}[row_format], largest_S)
    values_SD = torch.from_numpy(rows_SC[:, 4:].copy()).view(torch.int8)
    if row_format == "int8":
        expected_SD = torch.round(vectors_SD / torch.from_numpy(scale_S)[:, None]).nan_to_num(0)
        assert torch.equal(values_SD.float(), expected_SD)


@pytest.mark.parametrize("row_format", QUANTISED)
def test_a_row_that_has_no_scale_is_refused(row_format: RowFormat) -> None:
    for value in (float("inf"), float("nan")):
        vectors_SD = torch.ones(3, 4)
        vectors_SD[2, 1] = value
        with pytest.raises(ValueError, match=f"row_format='{row_format}': row 2"):
            to_storage(vectors_SD, row_format)


@pytest.mark.parametrize("row_format", STORAGE)
def test_arrow_gives_back_the_stored_rows_without_a_copy(row_format: RowFormat) -> None:
    rows_SC = to_storage(random_vectors(11, 6), row_format)
    batch = embedding_batch(rows_SC, row_format)
    assert np.array_equal(table_rows(batch), rows_SC)
    assert np.shares_memory(table_rows(batch), rows_SC)
    assert np.array_equal(table_rows(batch.slice(3, 5)), rows_SC[3:8])


@pytest.mark.parametrize("target", STORAGE)
@pytest.mark.parametrize("source", STORAGE)
def test_conversion_rounds_what_the_source_holds(source: RowFormat, target: RowFormat) -> None:
    rows_SC = to_storage(random_vectors(40, 10).clamp(-1e4, 1e4), source)
    held_SD = from_storage(rows_SC, source).float()
    assert np.array_equal(convert_rows(rows_SC, source, target), to_storage(held_SD, target))


@pytest.mark.parametrize("row_format", QUANTISED)
def test_converting_a_quantised_table_to_float_and_back_changes_nothing(
    row_format: RowFormat,
) -> None:
    rows_SC = to_storage(random_vectors(40, 10), row_format)
    wide_SC = convert_rows(rows_SC, row_format, "fp32")
    again_SC = convert_rows(wide_SC, "fp32", row_format)
    torch.testing.assert_close(
        from_storage(again_SC, row_format), from_storage(rows_SC, row_format), rtol=1e-6, atol=0
    )


def test_arrays_and_tensors_share_memory() -> None:
    rows_MD = np.zeros((2, 4), np.uint16)
    as_tensor(rows_MD)[1, 2] = 1.0
    assert rows_MD[1, 2] == 0x3F80
    assert as_array(as_tensor(rows_MD)).ctypes.data == rows_MD.ctypes.data


@pytest.mark.parametrize(("row_format", "allowed"), [("int8", 1e-4), ("fp8", 1e-3)])
def test_a_quantised_row_points_where_its_vector_does(
    row_format: RowFormat, allowed: float
) -> None:
    vectors_SD = random_vectors(200, 2048)
    vectors_SD = vectors_SD[vectors_SD.abs().amax(1) > 0]
    rows_SD = from_storage(to_storage(vectors_SD, row_format), row_format)
    cosine_S = torch.cosine_similarity(rows_SD.double(), vectors_SD.double())
    assert (1 - cosine_S).max() < allowed
