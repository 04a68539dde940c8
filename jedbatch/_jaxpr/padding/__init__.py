"""Programs on arrays whose lengths differ from instance to instance, padded to one capacity."""
