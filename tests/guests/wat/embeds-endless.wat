;; Embeds a list of texts that exceeds the memory.
;;! contract 0.2.0
;;! world import querl:plugin/similarity@0.1.0;
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
(module
  (import "querl:plugin/similarity@0.1.0" "embed" (func $embed (param i32 i32 i32)))
  ;;! include reward
  (func $odd (param i32)
    (call $embed (i32.const 65536) (i32.const 100000000) (i32.const 512)))
)
