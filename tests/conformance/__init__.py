"""The emulator held to a real SGLang: one table of cases, asked of both, compared. See docs/emulator.md."""
