"""Why a controller decided as it did: a decision log as a report for people."""
