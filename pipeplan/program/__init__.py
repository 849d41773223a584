"""Programs: what every rank executes, lowered from a plan and verified before it runs."""
