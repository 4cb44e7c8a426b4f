"""The caching allocator's own history as data: who held memory when, snapshot files, replays. Imports no torch."""
