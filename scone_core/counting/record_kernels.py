"""token windows <-> records, sorted groups -> n-grams: the compiled inner loops of the one-scan
engine.

Shapes: L tokens, D documents, G groups, R records, M n-grams, K max_n.
"""

import numba as nb
import numpy as np

_WORD = np.uint64(64)
_ONES = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@nb.njit(nogil=True, cache=True)
def add_counts(tokens_L: np.ndarray, sizes_G: np.ndarray) -> np.int64:
    """Add the occurrences of every token to `sizes_G`, up to a token outside the vocabulary.

    Returns:
        The largest token that was met.
    """
    largest = np.int64(0)
    for i in range(len(tokens_L)):
        token = np.int64(tokens_L[i])
        if token > largest:
            largest = token
        if token >= len(sizes_G):
            break
        sizes_G[token] += 1
    return largest


@nb.njit(inline="always")
def _push(
    low: np.uint64, high: np.uint64, token: np.uint64, bits: np.uint64, num_bits: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """The window of the position before: `token` in front, the last one dropped."""
    place = num_bits - bits
    if num_bits <= _WORD:
        return (low >> bits) | (token << place), high
    low = (low >> bits) | (high << (_WORD - bits))
    high >>= bits
    if place >= _WORD:
        return low, high | (token << (place - _WORD))
    return low | (token << place), high | (token >> (_WORD - place))


@nb.njit(nogil=True, cache=True)
def scatter(
    tokens_L: np.ndarray,
    offsets_D1: np.ndarray,
    first: int,
    last: int,
    max_n: int,
    bits: int,
    first_token: int,
    ends_G: np.ndarray,
    low_R: np.ndarray,
    high_R: np.ndarray | None,
) -> None:
    """Write the record of every position in front of `ends_G` of its group, and lower that by one.

    Positions are read from the back, so the window of next tokens costs one shift per position, and
    the end of a document resets it. Group g has the positions of token `first_token + g`; positions
    of other tokens are left out.
    """
    size, num_bits = np.uint64(bits), np.uint64(bits * (max_n - 1))
    ones = _ONES >> (_WORD - num_bits) if num_bits < _WORD else _ONES
    above = _ONES >> (_WORD + _WORD - num_bits) if num_bits > _WORD else np.uint64(0)
    document = np.searchsorted(offsets_D1, last, side="left") - 1
    while document >= 0 and offsets_D1[document + 1] > first:
        end = offsets_D1[document + 1]
        low, high = ones, above
        for i in range(min(end, last + max_n - 1) - 1, last - 1, -1):
            low, high = _push(low, high, np.uint64(tokens_L[i]), size, num_bits)
        for i in range(min(end, last) - 1, max(offsets_D1[document], first) - 1, -1):
            token = np.int64(tokens_L[i])
            group = token - first_token
            if 0 <= group < len(ends_G):
                place = ends_G[group] - 1
                ends_G[group] = place
                low_R[place] = low
                if high_R is not None:
                    high_R[place] = high
            low, high = _push(low, high, np.uint64(token), size, num_bits)
        document -= 1


@nb.njit(nogil=True, cache=True)
def append_groups(
    source_R: np.ndarray, starts_G1: np.ndarray, next_G: np.ndarray, column_R: np.ndarray
) -> None:
    """Copy each group of a column to its place `next_G` among the joined groups."""
    for group in range(len(next_G)):
        begin = starts_G1[group] - starts_G1[0]
        place = next_G[group]
        for i in range(starts_G1[group + 1] - starts_G1[group]):
            column_R[place + i] = source_R[begin + i]


@nb.njit(inline="always")
def _less(low_R: np.ndarray, high_R: np.ndarray, i: int, low: np.uint64, high: np.uint64) -> bool:
    return high_R[i] < high or (high_R[i] == high and low_R[i] < low)


@nb.njit(inline="always")
def _greater(
    low_R: np.ndarray, high_R: np.ndarray, i: int, low: np.uint64, high: np.uint64
) -> bool:
    return high_R[i] > high or (high_R[i] == high and low_R[i] > low)


@nb.njit(nogil=True, cache=True)
def sort_pairs(low_R: np.ndarray, high_R: np.ndarray, first: int, last: int) -> None:
    """Quicksort of (high, low) in place, insertion sort for short parts."""
    while last - first > 24:
        middle = (first + last) // 2
        low, high = low_R[middle], high_R[middle]
        for other in (first, last):  # the median of three, so that sorted input is not the worst
            if _less(low_R, high_R, other, low, high) == (other == last):
                low_R[other], low_R[middle] = low_R[middle], low_R[other]
                high_R[other], high_R[middle] = high_R[middle], high_R[other]
                low, high = low_R[middle], high_R[middle]
        i, j = first, last
        while i <= j:
            while _less(low_R, high_R, i, low, high):
                i += 1
            while _greater(low_R, high_R, j, low, high):
                j -= 1
            if i <= j:
                low_R[i], low_R[j] = low_R[j], low_R[i]
                high_R[i], high_R[j] = high_R[j], high_R[i]
                i += 1
                j -= 1
        if j - first < last - i:
            sort_pairs(low_R, high_R, first, j)
            first = i
        else:
            sort_pairs(low_R, high_R, i, last)
            last = j
    for i in range(first + 1, last + 1):
        low, high = low_R[i], high_R[i]
        j = i - 1
        while j >= first and _greater(low_R, high_R, j, low, high):
            low_R[j + 1], high_R[j + 1] = low_R[j], high_R[j]
            j -= 1
        low_R[j + 1], high_R[j + 1] = low, high


@nb.njit(inline="always")
def _at(high_R: np.ndarray | None, i: int) -> np.uint64:
    if high_R is None:
        return np.uint64(0)
    return np.uint64(high_R[i])


@nb.njit(inline="always")
def _shifted(low: np.uint64, high: np.uint64, shift: np.uint64) -> np.uint64:
    """The lowest 64 bits of (high, low) >> shift."""
    if shift >= _WORD:
        return high >> (shift - _WORD)
    if shift == 0:
        return low
    return (low >> shift) | (high << (_WORD - shift))


@nb.njit(inline="always")
def _any_above(low: np.uint64, high: np.uint64, shift: np.uint64) -> bool:
    """Whether any bit of (high, low) at or above `shift` is set."""
    if shift >= _WORD:
        return (high >> (shift - _WORD)) != 0
    return ((low >> shift) | high) != 0


@nb.njit(inline="always")
def _num_bits(num: int) -> np.uint64:
    """The bits that the numbers of `num` records need."""
    bits = np.uint64(1)
    while np.uint64(num) >> bits:
        bits += np.uint64(1)
    return bits


@nb.njit(nogil=True, cache=True)
def number_groups(
    low_R: np.ndarray,
    high_R: np.ndarray,
    starts_G1: np.ndarray,
    num_bits: int,
    min_size: int,
    keys_R: np.ndarray,
) -> None:
    """Write a word for every record of the groups of at least `min_size`: its highest bits, as many
    as leave room for its number in the group.
    """
    for group in range(len(starts_G1) - 1):
        first, num = starts_G1[group], starts_G1[group + 1] - starts_G1[group]
        if num >= min_size:
            room = _num_bits(num)
            shift = np.uint64(num_bits) - _WORD + room
            for i in range(num):
                top = _shifted(low_R[first + i], np.uint64(high_R[first + i]), shift)
                keys_R[first + i] = (top << room) | np.uint64(i)


@nb.njit(nogil=True, cache=True)
def place_groups(
    keys_R: np.ndarray,
    starts_G1: np.ndarray,
    min_size: int,
    low_R: np.ndarray,
    high_R: np.ndarray,
    sorted_low_R: np.ndarray,
    sorted_high_R: np.ndarray,
) -> None:
    """Write records in the order of their sorted words (`number_groups`), and sort those of equal
    highest bits.
    """
    for group in range(len(starts_G1) - 1):
        first, last = starts_G1[group], starts_G1[group + 1]
        if last - first < min_size:
            sorted_low_R[first:last] = low_R[first:last]
            sorted_high_R[first:last] = high_R[first:last]
            continue
        room = _num_bits(last - first)
        number = (np.uint64(1) << room) - np.uint64(1)
        begin = first
        for i in range(first, last):
            source = first + np.int64(keys_R[i] & number)
            sorted_low_R[i], sorted_high_R[i] = low_R[source], high_R[source]
            if i + 1 == last or (keys_R[i] ^ keys_R[i + 1]) >> room:
                if i > begin:
                    sort_pairs(sorted_low_R, sorted_high_R, begin, i)
                begin = i + 1


@nb.njit(nogil=True, cache=True)
def emit_groups(
    starts_G1: np.ndarray,
    low_R: np.ndarray,
    high_R: np.ndarray | None,
    first_token: int,
    max_n: int,
    bits: int,
    min_count: int,
    tokens_MK: np.ndarray,
    n_M: np.ndarray,
    counts_M: np.ndarray,
) -> int:
    """Write the frequent n-grams of all sorted groups; their number."""
    num = 0
    for group in range(len(starts_G1) - 1):
        first, last = starts_G1[group], starts_G1[group + 1]
        if last - first >= min_count:
            high = None if high_R is None else high_R[first:last]
            num = _emit_runs(
                low_R[first:last],
                high,
                first_token + group,
                max_n,
                bits,
                min_count,
                tokens_MK,
                n_M,
                counts_M,
                num,
            )
    return num


@nb.njit(nogil=True, cache=True)
def _emit_runs(
    low_R: np.ndarray,
    high_R: np.ndarray | None,
    token: int,
    max_n: int,
    bits: int,
    min_count: int,
    tokens_MK: np.ndarray,
    n_M: np.ndarray,
    counts_M: np.ndarray,
    num: int,
) -> int:
    """Write the frequent n-grams of one sorted group behind the first `num`; the new number.

    A run of n-grams ends where one of their n - 1 tokens in the record changes.
    """
    begins = np.zeros(max_n + 1, np.int64)
    size = np.uint64(bits)
    end = _ONES >> (_WORD - size)
    for i in range(1, len(low_R) + 1):
        low, high = low_R[i - 1], _at(high_R, i - 1)
        changed, changed_high = _ONES, _ONES
        if i < len(low_R):
            changed, changed_high = low ^ low_R[i], high ^ _at(high_R, i)
        n = max_n
        shift = np.uint64(0)
        while n >= 2 and _any_above(changed, changed_high, shift):
            if i - begins[n] >= min_count and _shifted(low, high, shift) & end != end:
                tokens_MK[num, 0] = token
                for j in range(1, n):
                    place = size * np.uint64(max_n - 1 - j)
                    tokens_MK[num, j] = _shifted(low, high, place) & end
                for j in range(n, max_n):
                    tokens_MK[num, j] = 0
                n_M[num] = n
                counts_M[num] = i - begins[n]
                num += 1
            begins[n] = i
            n -= 1
            shift += size
    return num
