"""Plans: ops and orders, layouts, named orders, and the plan folder."""
