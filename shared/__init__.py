"""Code that more than one chapter of the workshop uses: a lesson teaches it first, later ones import it."""
