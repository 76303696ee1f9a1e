"""A plug-in package: a Llama under a name of its own, and things that are no model."""

from motet.runtime.models.decoder import Decoder

OWN = "no class"


class Own(Decoder):
    """motet runs it only because this package says so."""
