"""Dead letters as operators handle them: found, grouped, redriven, discarded, and every action on record."""
