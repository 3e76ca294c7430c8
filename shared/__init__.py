"""What more than one chapter of the workshop uses: taught first in a lesson, imported afterwards."""
