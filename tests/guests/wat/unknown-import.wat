;; Imports an interface that no contract defines.
;;! world import surprise: interface { open: func(); }
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "surprise" "open" (func $open))
  ;;! include reward
  (func $odd (param i32)
    (call $open))
)
