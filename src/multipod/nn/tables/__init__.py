"""Tables of vectors: split over devices, as tensor trains, cached rows; lookups of bags of ids."""
