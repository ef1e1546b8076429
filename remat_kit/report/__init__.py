"""Records to text: table, JSON, markdown. Nothing is computed here: every number is a field of a record."""
