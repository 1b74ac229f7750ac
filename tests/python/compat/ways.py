# SPDX-License-Identifier: Apache-2.0
"""Records which calls of a drop-in were made at once."""


class Ways:
    """seen: the names of those that were, in their order; with in_steps none are. methods: (class,
    name of its method) of what makes them, and the name in `seen`."""

    def __init__(self, methods, in_steps=False):
        self.methods, self.in_steps, self.seen = methods, in_steps, []

    def __enter__(self):
        self.usual = {way: getattr(*way) for way in self.methods}
        for way, usual in self.usual.items():
            setattr(*way, self.watched(usual, self.methods[way]))
        return self

    def watched(self, usual, name):
        def call(*given):
            made = None if self.in_steps else usual(*given)
            if made is not None:
                self.seen.append(name)
            return made

        return call

    def __exit__(self, *_):
        for way, usual in self.usual.items():
            setattr(*way, usual)
