"""Pipeline schedules as values, and the executor that runs them."""
