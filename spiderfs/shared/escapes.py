"""How names and messages of any bytes are shown in lines of text: in the log, and in the lists of `.spiderfs`.

A name may have newlines, codes that command a terminal, and bytes that are no UTF-8. `\\xNN` stands for each byte of
what cannot be printed, and of the backslash itself; so the text determines each byte of the name.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    """The text in one printable line; what `os.fsdecode` makes of bytes that are no UTF-8 is escaped as these bytes."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(letter if letter.isprintable() and letter != "\\" else _codes(letter) for letter in text)


def escaped_path(path: bytes) -> bytes:
    return escaped(path.decode(errors="surrogateescape")).encode()


def _codes(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) & 0xFF:02x}"
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogatepass"))
