"""The method of a storage that makes its card."""

from __future__ import annotations

from tallyroll.storage.datasets.card.page import Card
from tallyroll.storage.datasets.card.storage_card import card_of
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.progress import Progress


class HasCard:
    """A storage that a card can be made of."""

    reader: RowReader

    def card(self, *, licence: str | None = None, progress: Progress | None = None) -> Card:
        """Return the card of the rows: a page for a hub, with its facts.

        ``str(card)`` is Markdown, with the front matter that the Hugging Face Hub reads: columns,
        counts, how to load it, the runs that made it with their seeds, policies and versions, kept
        statistics, the licence, and the hash of the content, for which all rows are read.

        Args:
            licence: such as ``"apache-2.0"``; None: unknown.
            progress: called now and then with the bytes that were read, and with all.

        Raises:
            NotInitialised: there is no schema yet.
            Overrun: a ring's writer overwrites rows while they are read.
        """
        self.reader.require_open()
        return card_of(self.reader, licence, progress)
