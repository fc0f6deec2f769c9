"""What a run is: models, clusters, layouts and run files. Pure data, no torch."""
