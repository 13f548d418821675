"""Token packing: documents in global order, concatenated and cut into sequences of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt
import torch

from ckpt.data.cursor import Batch, Cursor, Options, Plain, check_size
from ckpt.data.fingerprint import array_fingerprint, dataset_fingerprint, sample_of
from ckpt.data.permutation import Indices
from ckpt.errors import CkptError, StateMismatch

Lengths = npt.ArrayLike | Callable[[int], int]

_BLOCK = 1024  # documents looked up at a time
_REMEMBERED = 4096  # batches whose end is remembered; more than any DataLoader runs ahead


class Piece(NamedTuple):
    """Tokens start to stop - 1 of a document (an index into the data set) of `length` tokens."""

    document: int
    start: int
    stop: int
    length: int


class PackedPlace(NamedTuple):
    """Where a global batch begins: after `total` sequences, at token `offset` of the document that comes at position
    `document` of the epoch's order."""

    total: int
    epoch: int
    document: int
    offset: int


class PackedCursor(Cursor[PackedPlace]):
    """Sequences of `seq_len` tokens, cut from the documents in global order; see `Cursor` for the other arguments.

    The unit is the sequence: global_batch counts sequences. A sequence takes up where the last one stopped, so
    documents are split where a sequence is full. With epoch_end="wrap" a sequence may hold the end of one epoch and the
    beginning of the next; "drop" leaves out the tokens at an epoch's end that do not fill a global batch. The place is
    (epoch, document, token offset). A key is a tuple of `Piece`, which `PackedSequences` turns into tokens.

    lengths: tokens of every document, an array of ints [size], or a function from a document's index to its length,
    which is called for some hundred documents at a time as their turn comes. All of an array is fingerprinted, of a
    function some values.

    Every rank walks all documents of a global batch. Raises CkptError for lengths that are negative, or too few to fill
    a global batch where an epoch has to.
    """

    unit = "sequences"

    def __init__(self, size: int, fingerprint: str, lengths: Lengths, seq_len: int, **options: Unpack[Options]) -> None:
        super().__init__(size, fingerprint, **options)
        if seq_len < 1:
            raise CkptError(f"seq_len={seq_len} must be at least 1")
        self.seq_len = seq_len
        self._after: dict[PackedPlace, tuple[int, PackedPlace]] = {}
        self._block = lru_cache(maxsize=8)(self._looked_up)
        if callable(lengths):
            self._array, self._length = None, lengths
            sampled = sample_of(self.size)
            self.lengths_fingerprint = "function " + array_fingerprint(self._lengths(sampled))
        else:
            self._array = _checked(np.asarray(lengths), self.size)
            self.lengths_fingerprint = "array " + array_fingerprint(self._array)
            self._check_enough(int(self._array.sum(dtype=np.int64)))

    @classmethod
    def over(
        cls,
        documents: Sized,
        lengths: Lengths,
        seq_len: int,
        *,
        fingerprint: str | None = None,
        **options: Unpack[Options],
    ) -> PackedCursor:
        """A cursor over these documents, whose fingerprint is computed from some of them unless it is given."""
        found = dataset_fingerprint(documents) if fingerprint is None else fingerprint
        return cls(len(documents), found, lengths, seq_len, **options)

    @property
    def total(self) -> int:
        """Sequences trained on since the run began."""
        return self._place.total

    @property
    def tokens(self) -> int:
        """Tokens trained on since the run began."""
        return self._place.total * self.seq_len

    def configuration(self) -> dict[str, Plain]:
        return super().configuration() | {"lengths_fingerprint": self.lengths_fingerprint, "seq_len": self.seq_len}

    def check_dataset(self, dataset: Any) -> None:
        if not isinstance(dataset, PackedSequences):
            raise StateMismatch(f"a PackedCursor goes with a PackedSequences, not with a {type(dataset).__name__}")
        check_size(self, len(dataset.documents))

    def _start(self) -> PackedPlace:
        return PackedPlace(0, 0, 0, 0)

    def _position(self) -> dict[str, int]:
        return self._place._asdict()

    def _parsed(self, position: Mapping[str, int]) -> PackedPlace:
        place = PackedPlace(**position)
        if place.document >= self.size:
            raise ValueError(f"an epoch has {self.size} documents")
        (length,) = self._lengths(self.in_epoch(place.epoch, place.document, place.document + 1))
        if place.offset and place.offset >= length:
            raise ValueError(f"that document has {length} tokens")
        if place.total % self.global_batch:
            raise ValueError(f"a global batch has {self.global_batch} sequences")
        return place

    def _batch(self, place: PackedPlace, first: int, last: int) -> Batch[PackedPlace]:
        if first == last and place in self._after:
            return Batch((), *self._after[place])
        begin, cut = place, self._cut(place)
        if cut is None:
            begin = PackedPlace(place.total, place.epoch + 1, 0, 0)
            cut = self._cut(begin)
        if cut is None:
            raise CkptError(
                f"the documents of epoch {begin.epoch} do not fill a global batch of {self.global_batch} sequences of "
                f'{self.seq_len} tokens; use epoch_end="wrap" or a smaller global_batch'
            )
        sequences, after = cut
        if len(self._after) == _REMEMBERED:
            self._after.clear()
        self._after[place] = begin.epoch, after
        return Batch(sequences[first:last], begin.epoch, after)

    def _cut(self, place: PackedPlace) -> tuple[list[tuple[Piece, ...]], PackedPlace] | None:
        """The sequences of the global batch that begins exactly here, and where the next one does; None when the
        documents end before."""
        sequences: list[tuple[Piece, ...]] = []
        pieces: list[Piece] = []
        room, offset = self.seq_len, place.offset
        for epoch, document, number, length in self._documents(place.epoch, place.document):
            while offset < length:
                stop = min(length, offset + room)
                pieces.append(Piece(number, offset, stop, length))
                room -= stop - offset
                offset = stop
                if room == 0:
                    sequences.append(tuple(pieces))
                    pieces, room = [], self.seq_len
                if len(sequences) == self.global_batch:
                    return sequences, self._after_token(place.total, epoch, document, offset, length)
            offset = 0
        return None

    def _after_token(self, total: int, epoch: int, document: int, offset: int, length: int) -> PackedPlace:
        if offset == length:
            document, offset = document + 1, 0
        if document == self.size:
            epoch, document = epoch + 1, 0
        return PackedPlace(total + self.global_batch, epoch, document, offset)

    def _documents(self, epoch: int, document: int) -> Iterator[tuple[int, int, int, int]]:
        """(epoch, position in it, index, length) of each document from here on; for "drop" to the epoch's end."""
        while True:
            whole, tokens = document == 0, 0
            while document < self.size:
                for number, length in self._block(epoch, document // _BLOCK)[document % _BLOCK :]:
                    yield epoch, document, number, length
                    document += 1
                    tokens += length
            if self.epoch_end == "drop":
                return
            if whole and not tokens:
                raise CkptError("all documents are empty, so they fill no sequence")
            epoch, document = epoch + 1, 0

    def _looked_up(self, epoch: int, block: int) -> list[tuple[int, int]]:
        """(index, length) of the documents of one block of an epoch's order."""
        numbers = self.in_epoch(epoch, block * _BLOCK, min((block + 1) * _BLOCK, self.size))
        return list(zip(numbers.tolist(), self._lengths(numbers).tolist(), strict=True))

    def _lengths(self, numbers: Indices) -> Indices:
        if self._array is not None:
            return self._array[numbers].astype(np.int64)
        return _checked(np.array([self._length(n) for n in numbers.tolist()]), numbers.size)

    def _check_enough(self, tokens: int) -> None:
        if tokens < (self.global_batch * self.seq_len if self.epoch_end == "drop" else 1):
            raise CkptError(
                f"the documents have {tokens} tokens, which never fill a global batch of {self.global_batch} sequences "
                f'of {self.seq_len} tokens; use epoch_end="wrap" or a smaller global_batch'
            )


class PackedSequences:
    """A map-style data set whose keys are tuples of `Piece`: fetches the documents and joins the pieces.

    An item is {"tokens": of the documents' dtype, "segments": int64, "positions": int64}, each [seq_len]: the tokens,
    the number of the piece that each comes from (0, 1, ... within the sequence), and its position in its own document.
    Attention masks and position ids that respect documents follow from the last two.

    documents: map-style; an item is a one-dimensional tensor, array or list of token numbers, or anything from which
    `tokens` takes that (picklable, where workers are spawned). Raises StateMismatch for a document whose length is not
    the one that the cursor was given, or whose dtype is another than its neighbours'.
    """

    def __init__(self, documents: Any, tokens: Callable[[Any], Any] | None = None) -> None:
        self.documents, self.tokens = documents, tokens

    def __getitem__(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        parts = [self._part(piece) for piece in pieces]
        dtypes = {part.dtype: piece.document for part, piece in zip(parts, pieces, strict=True)}
        if len(dtypes) > 1:
            raise StateMismatch(
                f"the documents {sorted(dtypes.values())} have different dtypes, {sorted(map(str, dtypes))}"
            )
        sizes = torch.tensor([part.numel() for part in parts])
        return {
            "tokens": torch.cat(parts),
            "segments": torch.repeat_interleave(torch.arange(len(parts)), sizes),
            "positions": torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]),
        }

    def _part(self, piece: Piece) -> torch.Tensor:
        document = self.documents[piece.document]
        tokens = document if self.tokens is None else self.tokens(document)
        if not isinstance(tokens, torch.Tensor):
            tokens = np.asarray(tokens)
        if tuple(tokens.shape) != (piece.length,):
            raise StateMismatch(
                f"document {piece.document} has tokens of shape {list(tokens.shape)}, but its length was given as "
                f"{piece.length}; give the lengths of these documents as they are tokenized now"
            )
        part = tokens[piece.start : piece.stop]
        return part if isinstance(part, torch.Tensor) else torch.from_numpy(part.copy())


def _checked(lengths: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    if lengths.shape != (size,) or lengths.dtype.kind not in "iu":
        raise CkptError(f"lengths are {lengths.dtype}{list(lengths.shape)}; give an int for each of {size} documents")
    if lengths.min() < 0:
        raise CkptError(
            f"the length of document {int(lengths.argmin())} is {lengths.min()}; lengths must not be negative"
        )
    return lengths
